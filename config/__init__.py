"""Every setting, the model presets and ready runs as YAML. Imports nothing of the library but its error class."""

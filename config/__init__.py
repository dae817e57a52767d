"""Every setting and its help; as YAML files tables of models, recipes and other launchers' words, and ready runs."""

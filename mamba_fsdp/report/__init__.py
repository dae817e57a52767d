"""What a person looks at: progress, tables, metrics."""

"""Others' tokens as documents, for the writer of token stores: one module a format. Each yields lists of
Document."""

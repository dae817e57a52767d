"""Side by side with peers, in one run: each benchmark prints a table. README.md lists them."""

"""The operators behind the model: what each computes (formula, source, shapes), and its forms (see forms.py)."""

"""Scripts as users of verl have them, word for word; `test_ported.py` changes their import lines and runs them on Ray."""

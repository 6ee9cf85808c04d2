"""SQuAD 1.1 and 2.0 (section 5.3, table 5): files, windows, answers from logits, and the scorer."""

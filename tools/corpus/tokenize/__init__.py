"""From text to the token files that training reads, for tools/preprocess_data.py."""

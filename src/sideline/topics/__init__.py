"""Topics as the broker knows them."""

"""Where a slice commits: effects, failures and progress together."""

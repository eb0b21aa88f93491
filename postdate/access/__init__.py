"""Who may do what: the broker's own token, users, and their rules."""

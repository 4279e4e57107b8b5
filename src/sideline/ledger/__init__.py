"""What sideline keeps in PostgreSQL: progress, owners and, later, what waits aside."""

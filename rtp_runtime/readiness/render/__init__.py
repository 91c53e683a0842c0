"""How the ladder, measurements and comparisons look: terminal, page, pictures."""

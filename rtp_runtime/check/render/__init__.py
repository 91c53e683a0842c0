"""A check's report for people: on a terminal, and as one self-contained HTML file."""

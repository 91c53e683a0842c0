"""What the serving dtype adds to each sub-block, in units of what it adds in the reference."""

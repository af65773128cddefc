"""Sessions that move to another daemon, and from one."""

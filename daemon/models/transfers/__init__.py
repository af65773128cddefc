"""Files of models on their way to another daemon, and from one."""

"""llama.cpp as it is installed: its version, the command that installs parts, its log."""

"""The installed llama.cpp: its version, the command that installs parts of inferd, and its log."""

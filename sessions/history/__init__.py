"""The tokens of a conversation, and how they change with chats and models."""

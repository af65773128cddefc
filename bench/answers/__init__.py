"""Answers in the forms of chat templates: parsed here, by llama-server, and rendered again."""

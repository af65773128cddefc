"""Commands that run a model: run, chat, embed, template."""

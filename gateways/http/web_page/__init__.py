"""The web page at `/`: chats, the queue, and the models. Its programs run in the browser."""

from .api import PAGE

__all__ = ("PAGE",)

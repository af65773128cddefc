"""Certificates of the fleet's own authority, and TLS between its members with them."""

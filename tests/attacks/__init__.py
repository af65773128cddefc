"""Attacks of one user on a daemon that others use, and damage that must stay small."""

"""Copies of sessions that are on other daemons, kept in case these daemons are lost."""

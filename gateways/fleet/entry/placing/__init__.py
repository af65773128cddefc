"""The place of graphs and contexts: opened, leased and remembered on nodes."""

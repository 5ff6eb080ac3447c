"""Trees and tables for the terminal: results in, renderables of rich out. The command line prints them."""

"""Tables, plots and HTML pages, made from run directories only."""

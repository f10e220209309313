"""What was measured: a data file for each machine, and the pages, the README's table and the charts that are made of them."""

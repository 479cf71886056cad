"""Pages from ledger entries: one static HTML file with its pictures inside, for a phone as for a desk. Needs matplotlib."""

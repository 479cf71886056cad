"""Who holds what when several devices serve one model: layouts, and what one rank of a layout holds and exchanges."""

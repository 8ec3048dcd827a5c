"""Parameters that a graph holds only while it uses them: their layers, and nodes that fetch and send them."""

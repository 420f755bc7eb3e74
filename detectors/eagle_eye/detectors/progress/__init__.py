"""Jobs that stand still or end: hangs, crashes, nodes that fall silent."""

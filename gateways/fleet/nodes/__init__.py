"""The nodes of a fleet as its entry knows them: links, connections, moves, fair shares."""

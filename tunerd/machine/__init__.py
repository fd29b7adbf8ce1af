"""What this computer is and does: files, processes, cards, sockets, time. Every effect on it has its one owner here."""

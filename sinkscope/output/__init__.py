"""Results with their figures, page and verdict, and how they are written into folders."""

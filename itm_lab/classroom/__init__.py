"""A course from the book: folders for nbgrader, submissions graded apart, slides and questions."""

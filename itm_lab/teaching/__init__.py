"""What a chapter teaches with: figures in one style, the toy tensor, classes written method by method."""

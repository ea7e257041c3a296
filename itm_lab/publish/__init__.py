"""What readers see: exported modules, checked notebooks, copies for classes and GPUs, generated pages, the HTML book."""

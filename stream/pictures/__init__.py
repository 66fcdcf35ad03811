"""Pictures for pages and notebooks: SVG and HTML, without a library and without the internet."""

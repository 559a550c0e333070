"""Hook of mkdocs: docs/index.md is the home of the site, and the repository's README a page of it."""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ADDRESSES = {"docs/index.md": "index.html", "README.md": "about/index.html"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Move pages to their addresses; links between documents follow."""
    for path, address in ADDRESSES.items():
        file = files.src_uris[path]
        files.remove(file)
        files.append(File(path, file.src_dir, config.site_dir, config.use_directory_urls, dest_uri=address))
    return files

"""A person's own data: folders of images and files of annotations, read with a report of all that is wrong."""

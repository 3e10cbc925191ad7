"""Writes the dashboards as JSON into the chart; `make chart` runs it."""

from helm.dashboards.files import FOLDER, render

if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in render().items():
        (FOLDER / name).write_text(text, "utf-8")

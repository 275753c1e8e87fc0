"""A JSON file is whole or not there."""

import json
import os
import stat

import pytest

from h3lib.files import write_json


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"rows": 264, "name": "α"})
    assert json.loads(path.read_text()) == {"rows": 264, "name": "α"}
    assert path.read_text().endswith("}\n")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("content", [{"a": object()}, {"rows": [1, {"b": {1, 2}}]}])
def test_what_json_cannot_hold_leaves_the_old_file_and_nothing_else(content, tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json(path, content)
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(OSError):
        write_json(tmp_path / "no" / "a.json", {})

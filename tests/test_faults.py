"""The table of known faults names tests that exist, and every fault test is in the table."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROW = re.compile(r"\| ([QKCR]\d+) \| .+? \| (.+) \|")


def rows() -> dict[str, str]:
    """Fault id to its cell of tests."""
    matches = map(ROW.fullmatch, (TESTS / "faults.md").read_text().splitlines())
    return {match[1]: match[2] for match in matches if match}


def defined_tests() -> set[str]:
    """Names of the test functions in the source of every test file."""
    return {
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_row_names_tests_that_exist_or_says_why_not():
    table, existing = rows(), defined_tests()
    assert len(table) == 47
    for fault, cell in table.items():
        named = re.findall(r"`(test_\w+)`", cell)
        assert named or re.fullmatch(r"- \(.{20,}\)", cell), fault
        assert set(named) <= existing, (fault, set(named) - existing)


def test_every_fault_test_is_in_the_table_under_its_id():
    table = rows()
    for name in defined_tests():
        for fault in re.findall(r"(?:fault|and)_([qkcr]\d+)(?=_)", name) if name.startswith("test_fault_") else ():
            assert f"`{name}`" in table[fault.upper()], name

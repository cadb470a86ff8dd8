"""A table as users have it: odd names, quotes, missing and absurd values."""

import csv

import numpy as np

RARE = "Zwischenwasser"  # A city in a single row.


def people(rows=1500):
    """Returns columns by name, with the target "bought".

    Args:
        rows: Int.
    """
    rng = np.random.default_rng(0)
    age = rng.integers(18, 80, rows)
    city = rng.choice(['Old "Town"', "Bonn, West"], rows).astype(object)
    bought = (age + 30 * (city == "Bonn, West") + rng.normal(size=rows) > 64).tolist()
    ages = age.astype(str)
    ages[:4] = "", "1e30", "inf", "NaN"
    city[5], city[6:200] = RARE, ""
    return {
        "age in years": ages,
        "city": city,
        "income/month": np.exp(rng.normal(8, 1, rows)),
        "owns": rng.choice(["true", "false", ""], rows),
        "constant": [7] * rows,
        "bought": ["yes" if has_bought else "no" for has_bought in bought],
    }


def write(path, columns, encoding="utf-8"):
    """Writes columns as a CSV file, and returns its path."""
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path

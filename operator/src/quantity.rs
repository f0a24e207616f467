//! Amounts as Kubernetes writes them: the API server answers `500m` to who wrote `0.5`.

/// Whether two texts are the same amount. Texts that are none are the same if they are equal.
pub fn same_quantity(a: &str, b: &str) -> bool {
    match (millis(a), millis(b)) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

/// In thousandths. Less than that is not told apart.
fn millis(text: &str) -> Option<u128> {
    let digits = text.find(|char: char| !char.is_ascii_digit() && char != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let (numerator, denominator) = factor(unit)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let scale = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let value: u128 = format!("{whole}{fraction}").parse().ok()?;
    Some(value.checked_mul(1000)?.checked_mul(numerator)? / scale.checked_mul(denominator)?)
}

fn factor(unit: &str) -> Option<(u128, u128)> {
    Some(match unit {
        "" => (1, 1),
        "n" => (1, 1_000_000_000),
        "u" => (1, 1_000_000),
        "m" => (1, 1000),
        "k" => (1000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (1_000_000_000_000, 1),
        "P" => (1_000_000_000_000_000, 1),
        "E" => (1_000_000_000_000_000_000, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        exponent => {
            let power: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            let magnitude = 10_u128.checked_pow(power.unsigned_abs())?;
            if power < 0 { (1, magnitude) } else { (magnitude, 1) }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_amount_has_many_spellings() {
        for (a, b) in [("0.5", "500m"), ("1Gi", "1024Mi"), ("1e3", "1k"), ("1.5Gi", "1536Mi"), ("2", "2000m")]
        {
            assert!(same_quantity(a, b), "{a} {b}");
        }
        for (a, b) in [("1G", "1Gi"), ("1", "1k"), ("x", "y"), ("", "0")] {
            assert!(!same_quantity(a, b), "{a} {b}");
        }
        assert!(same_quantity("x", "x"));
    }
}

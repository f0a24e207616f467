//! What is built.

use harmonia_tests::nixes::Expression;

/// Derivations, and one that needs them all.
pub struct Work {
    pub name: &'static str,
    pub top: Expression,
}

impl Work {
    /// So many that have nothing to do with each other. Each sees its number as `$n`.
    pub fn independent(name: &'static str, count: usize, script: &str) -> Work {
        let top = (0..count).fold(Expression::trivial("all"), |top, n| {
            let one = Expression::new(&format!("{name}-{n}"), script).attribute("n", &n.to_string());
            top.input(&format!("input{n}"), &one)
        });
        Work { name, top }
    }

    /// Each needs the one before it.
    pub fn chain(name: &'static str, links: usize) -> Work {
        let link = |n: usize| Expression::trivial(&format!("{name}-{n}"));
        let top = (1..links).fold(link(0), |before, n| link(n).input("before", &before));
        Work { name, top }
    }

    /// Whether a derivation counts.
    pub fn measures(&self, drv_path: &str) -> bool {
        let name = drv_path.get("/nix/store/".len() + 33..).unwrap_or_default();
        name.strip_prefix(self.name).is_some_and(|rest| rest.starts_with('-'))
    }
}

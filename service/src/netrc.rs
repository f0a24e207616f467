//! netrc's form, which binds each secret to a host: `machine git.example.org login ci password …`.

/// What a host is shown.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// Who sees it.
    pub host: String,
    /// A name.
    pub login: String,
    /// The secret.
    pub password: String,
}

/// A secret is nobody's to print.
impl std::fmt::Debug for Machine {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{:?}", self.host)
    }
}

/// The hosts that a text names, each with its secret; or what is wrong with it, without a word of the secret.
pub fn parse(text: &str) -> Result<Vec<Machine>, &'static str> {
    let mut machines: Vec<Machine> = Vec::new();
    let mut words = text.split_whitespace();
    while let Some(word) = words.next() {
        let mut value = || words.next().map(str::to_owned).ok_or("a word is missing at its end");
        match (word, machines.last_mut()) {
            ("machine", _) => machines.push(Machine { host: value()?, ..Machine::default() }),
            ("login", Some(machine)) => machine.login = value()?,
            ("password", Some(machine)) => machine.password = value()?,
            ("default", _) => {
                return Err("`default` would show the secret to every host: name the host with `machine`");
            }
            _ => return Err("write `machine HOST login NAME password SECRET`, for each host"),
        }
    }
    let whole = |machine: &Machine| !machine.login.is_empty() && !machine.password.is_empty();
    if machines.is_empty() || !machines.iter().all(whole) {
        return Err("write `machine HOST login NAME password SECRET`, for each host");
    }
    Ok(machines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_bound_to_hosts_and_not_printed() {
        let text = "machine github.com\n login me password s1\nmachine git.example.org login me password s2";
        let machines = parse(text);
        assert_eq!(format!("{machines:?}"), r#"Ok(["github.com", "git.example.org"])"#);
        let secrets = machines.into_iter().flatten().map(|machine| machine.password).collect::<Vec<_>>();
        assert_eq!(secrets, ["s1", "s2"]);
    }

    #[test]
    fn a_secret_for_everybody_or_half_of_one_is_refused() {
        for text in ["", "default login me password s", "machine h login me", "password s", "machine"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}

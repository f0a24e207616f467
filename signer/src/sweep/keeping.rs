//! For how long what is kept.

use std::time::Duration;

use harmonia_service::bucket::SLOT_LIFETIME;
use harmonia_service::quantity::Span;
use harmonia_service::settings::{Settings, SettingsError};

const DAY: Duration = Duration::from_secs(86_400);
/// An upload that began within a slot's life may take as long again.
const LEAST: Duration = Duration::from_secs(2 * SLOT_LIFETIME.as_secs());

/// For how long what is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keeping {
    /// How often it is swept. None: by hand only.
    pub every: Option<Duration>,
    /// For so long after it was written, and again after it was found that nobody needs it, nothing is removed.
    pub grace: Duration,
    /// Logs of attempts are kept for so long.
    pub logs: Duration,
}

impl Keeping {
    /// As the settings say.
    pub fn of(settings: &Settings) -> Result<Self, SettingsError> {
        let span = |key| Ok::<_, SettingsError>(settings.parse::<Span>(key)?.map(|span| span.0));
        let grace = span("sweep_grace")?.unwrap_or(DAY);
        if grace < LEAST {
            return Err(SettingsError::Invalid {
                key: "sweep_grace",
                value: Span(grace).to_string(),
                why: format!("is less than the {} that an upload may take", Span(LEAST)),
            });
        }
        let every = span("sweep_every")?.unwrap_or(DAY);
        Ok(Self {
            every: Some(every).filter(|every| !every.is_zero()),
            grace,
            logs: span("log_retention")?.unwrap_or(30 * DAY),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn without_settings_a_day_is_a_grace_and_a_month_the_life_of_a_log() {
        let keeping = Keeping::of(&Settings::default()).unwrap();
        assert_eq!(keeping, Keeping { every: Some(DAY), grace: DAY, logs: 30 * DAY });
    }

    #[test]
    fn a_grace_shorter_than_an_upload_is_refused() {
        let error = Keeping::of(&Settings::default().with("sweep_grace", "10m")).unwrap_err().to_string();
        assert!(error.contains("10m") && error.contains("30m"), "{error}");
    }

    #[test]
    fn zero_is_never() {
        assert_eq!(Keeping::of(&Settings::default().with("sweep_every", "0s")).unwrap().every, None);
    }
}

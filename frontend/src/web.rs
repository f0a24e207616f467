//! The web pages: HTML from the server, of which a browser may refresh the part that changed. They work without a script; with
//! one, whatever changes is seen within two seconds.

mod act;
mod admin;
mod ansi;
mod ask;
mod assets;
mod build;
mod dashboard;
mod evaluation;
mod findings;
mod frame;
mod github;
mod guard;
mod live;
mod log;
mod member;
mod nodes;
mod oidc;
mod parts;
mod picture;
mod project;
mod provider;
mod queue;
mod recall;
mod session;
mod sign_in;
mod sought;
mod visitor;
mod watch;
mod you;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use harmonia_queue::{Db, evaluations};
use harmonia_service::settings::{Settings, SettingsError};
use tokio::sync::{Semaphore, watch as channel};

use crate::admit::Admission;
use crate::api::{Hub, Streams};
use crate::forge::Forges;
use crate::public_keys::PublicKeys;
use crate::shelf::Shelf;
use crate::turn::{Turn, Turns};

pub use guard::{PATIENCE, has_nul, lost};
pub use live::Live;
use provider::Provider;
use recall::Recall;
use session::Keys;
use watch::Watches;

/// Questions of the pages to the database at once, one of which is asked every second.
pub const ASKING: usize = 7;
/// Pages and logs that are followed at once.
const FOLLOWERS: usize = 4000;
/// Requests at once; those that follow something do not count.
const REQUESTS: usize = 256;
/// The longest form.
const BODY: usize = 64 << 10;

/// What pages are made of.
pub struct Web {
    admission: Arc<Admission>,
    turns: Turns,
    requests: Semaphore,
    shelf: Shelf,
    public_keys: PublicKeys,
    live: Arc<Live>,
    watches: Watches,
    streams: Streams,
    keys: Keys,
    /// Who says who people are, by the names in their addresses.
    providers: Vec<(String, Provider)>,
    forges: Arc<Forges>,
    /// Where people reach this frontend.
    url: String,
    overview: Recall<(), dashboard::Overview>,
    details: Recall<i64, evaluation::Detail>,
    evaluations: Recall<i64, evaluations::Evaluation>,
}

/// What the pages share with the rest of a frontend.
pub struct Shared {
    /// Who may look.
    pub admission: Arc<Admission>,
    /// Where everything is.
    pub db: Db,
    /// Where logs are.
    pub shelf: Shelf,
    /// The keys that sign the cache.
    pub public_keys: PublicKeys,
    /// Who hears what changes.
    pub hub: Arc<Hub>,
    /// Who knows people.
    pub forges: Arc<Forges>,
    /// Says when streams end.
    pub closing: channel::Receiver<bool>,
    /// Where people reach this frontend.
    pub url: String,
}

impl Web {
    /// As set.
    pub fn new(shared: Shared, settings: &Settings) -> Result<Self, SettingsError> {
        let Shared { admission, db, shelf, public_keys, hub, forges, closing, url } = shared;
        Ok(Self {
            live: Arc::new(Live::new(db.clone(), hub)),
            providers: provider::read(settings, &url, &forges)?,
            forges,
            keys: Keys::new(db.clone()),
            turns: Turns::new(db, ASKING - 1),
            requests: Semaphore::new(REQUESTS),
            watches: Watches::default(),
            streams: Streams::new(closing, FOLLOWERS),
            overview: Recall::new(1),
            details: Recall::new(64),
            evaluations: Recall::new(2000),
            admission,
            shelf,
            public_keys,
            url,
        })
    }

    /// What hears of changes, as long as it is polled.
    pub fn live(&self) -> Arc<Live> {
        self.live.clone()
    }

    async fn db(&self) -> Turn<'_> {
        self.turns.take().await
    }

    /// Every page. The table of contents.
    pub fn routes(self) -> Router {
        let web = Arc::new(self);
        Router::new()
            .route("/", get(dashboard::show))
            .route("/projects/{name}", get(project::show))
            .route("/evals/{id}", get(evaluation::show))
            .route("/evals/{id}/cancel", post(act::cancel_evaluation))
            .route("/evals/{id}/re-evaluate", post(act::re_evaluate))
            .route("/evals/{id}/rebuild-failed", post(act::rebuild_failed))
            .route("/evals/{id}/pin", post(act::pin))
            .route("/evals/{id}/unpin", post(act::unpin))
            .route("/builds/{id}", get(build::show))
            .route("/builds/{id}/rebuild", post(act::rebuild))
            .route("/builds/{id}/cancel", post(act::cancel_build))
            .route("/builds/{id}/log", get(log::show))
            .route("/builds/{id}/log/live", get(watch::follow))
            .route("/nodes", get(nodes::show))
            .route("/nodes/{id}/drain", post(act::drain))
            .route("/nodes/{id}/resume", post(act::resume))
            .route("/queue", get(queue::show))
            .route("/findings", get(findings::show))
            .route("/find", get(sought::find))
            .route("/admin", get(admin::show))
            .route("/admin/projects", post(admin::put_project))
            .route("/admin/projects/remove", post(admin::remove_project))
            .route("/admin/tokens", post(admin::create_token))
            .route("/admin/tokens/revoke", post(admin::revoke_token))
            .route("/sign-in", get(sign_in::ask).post(sign_in::by_token))
            .route("/sign-in/once", post(sign_in::by_invitation))
            .route("/sign-in/{provider}", get(sign_in::to_provider))
            .route("/sign-in/{provider}/back", get(sign_in::from_provider))
            .route("/sign-out", post(sign_in::out))
            .route("/you", get(you::show))
            .route("/you/tokens", post(you::create_token))
            .route("/you/tokens/revoke", post(you::revoke_token))
            .route("/live", get(live::follow))
            .route("/assets/{name}", get(assets::serve))
            .layer(DefaultBodyLimit::max(BODY))
            .layer(from_fn_with_state(web.clone(), guard::keep))
            .with_state(web)
    }
}

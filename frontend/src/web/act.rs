//! What people do with a button: the same as by the API, then back to the page.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Redirect;
use harmonia_queue::{evaluations, people};

use super::Web;
use super::ask::Numbered;
use super::frame::Trouble;
use super::visitor::{LOOK, OPERATE, Ordered};
use crate::api::{DRAINED_BY_HAND, end_evaluation, known_build, node_number};
use crate::member::Target;

type Done = Result<Redirect, Trouble>;
type Operator = Ordered<OPERATE>;
/// Somebody who is signed in: what they may do depends on what it is about.
type Signed = Ordered<LOOK>;

impl Web {
    /// Somebody changed something here: nobody is shown what was before.
    pub fn changed(&self) {
        self.overview.forget();
        self.details.forget();
        self.evaluations.forget();
        self.live.change();
    }

    fn back(&self, to: &str) -> Done {
        self.changed();
        Ok(Redirect::to(to))
    }
}

/// Ends an evaluation.
pub async fn cancel_evaluation(
    State(web): State<Arc<Web>>,
    Numbered(id): Numbered,
    Ordered(sent): Signed,
) -> Done {
    web.require(&sent.visitor, Target::Evaluation(id)).await?;
    end_evaluation(&*web.db().await, id).await?;
    web.back(&format!("/evals/{id}"))
}

/// Begins the same once more, and shows that one.
pub async fn re_evaluate(State(web): State<Arc<Web>>, Numbered(id): Numbered, Ordered(sent): Signed) -> Done {
    web.require(&sent.visitor, Target::Evaluation(id)).await?;
    let another = evaluations::repeat(&*web.db().await, id).await?;
    web.back(&format!("/evals/{another}"))
}

/// Tries again what failed.
pub async fn rebuild_failed(
    State(web): State<Arc<Web>>,
    Numbered(id): Numbered,
    Ordered(sent): Signed,
) -> Done {
    web.require(&sent.visitor, Target::Evaluation(id)).await?;
    evaluations::rebuild_failed(&*web.db().await, id).await?;
    web.back(&format!("/evals/{id}"))
}

/// Keeps an evaluation, and all it built, for good.
pub async fn pin(State(web): State<Arc<Web>>, Numbered(id): Numbered, _: Operator) -> Done {
    evaluations::pin(&*web.db().await, id, true).await?;
    web.back(&format!("/evals/{id}"))
}

/// Lets it go when its time is over.
pub async fn unpin(State(web): State<Arc<Web>>, Numbered(id): Numbered, _: Operator) -> Done {
    evaluations::pin(&*web.db().await, id, false).await?;
    web.back(&format!("/evals/{id}"))
}

/// Tries one build again.
pub async fn rebuild(State(web): State<Arc<Web>>, Numbered(id): Numbered, Ordered(sent): Signed) -> Done {
    web.require(&sent.visitor, Target::Rebuild(id)).await?;
    people::rebuild(&*web.db().await, id).await?;
    web.back(&format!("/builds/{id}"))
}

/// Ends one build.
pub async fn cancel_build(
    State(web): State<Arc<Web>>,
    Numbered(id): Numbered,
    Ordered(sent): Signed,
) -> Done {
    web.require(&sent.visitor, Target::Cancel(id)).await?;
    let db = web.db().await;
    known_build(&db, id).await?;
    people::cancel(&db, id).await?;
    web.back(&format!("/builds/{id}"))
}

/// Lets a node finish what it has and claim nothing more.
pub async fn drain(State(web): State<Arc<Web>>, Numbered(id): Numbered, _: Operator) -> Done {
    people::drain(&*web.db().await, node_number(id)?, DRAINED_BY_HAND, None).await?;
    web.back("/nodes")
}

/// Lets it claim again.
pub async fn resume(State(web): State<Arc<Web>>, Numbered(id): Numbered, _: Operator) -> Done {
    people::resume(&*web.db().await, node_number(id)?, DRAINED_BY_HAND).await?;
    web.back("/nodes")
}

//! Whether a router has looked at a request and found no route for it.
//!
//! axum runs `Router::layer` for its fallback too, and a missing page is a 404, not a missing key.
//! Everything else that has no key is a handler that must not run without its lock.

use http::request::Parts;

#[cfg(feature = "axum")]
pub(crate) fn matched_no_route(parts: &Parts) -> bool {
    use axum::extract::{MatchedPath, OriginalUri};

    let routed = parts.extensions.get::<OriginalUri>().is_some();
    let matched = parts.extensions.get::<MatchedPath>().is_some();
    routed && !matched && !is_in_nested_service(parts)
}

/// Whether the request is on its way into a `Router::nest_service`.
///
/// For the layers around it axum keeps the path of the nesting to itself. It shows only in the
/// paths of the routes that are matched further in, which it precedes; so one is, with a router of
/// one route. Only requests without a key and without a matched path come here.
#[cfg(feature = "axum")]
fn is_in_nested_service(parts: &Parts) -> bool {
    use std::convert::Infallible;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use axum::Router;
    use axum::body::Body;
    use axum::extract::{MatchedPath, Request};
    use axum::response::Response;
    use tower::{Service, service_fn};

    let report = service_fn(|request: Request| async move {
        let matched = request.extensions().get::<MatchedPath>();
        let is_nested = matched.is_none_or(|path| path.as_str() != "/");
        let mut response = Response::new(Body::empty());
        response.extensions_mut().insert(is_nested);
        Ok::<_, Infallible>(response)
    });
    let mut router: Router = Router::new().route_service("/", report);
    let mut probe = Request::new(Body::empty());
    *probe.extensions_mut() = parts.extensions.clone();
    let answer = pin!(Service::call(&mut router, probe));
    match answer.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(response)) => response.extensions().get() != Some(&false),
        // It waits for nothing; should it ever, the lock must not be left out.
        Poll::Pending => true,
    }
}

#[cfg(not(feature = "axum"))]
pub(crate) fn matched_no_route(_: &Parts) -> bool {
    false
}

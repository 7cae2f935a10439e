//! Work that is not cancelled by whoever waits for it.

use std::{
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::runtime::Handle;

/// Work that is done where it is awaited, and goes on in a task of its own if that is given up. Mostly it is not, and a task
/// from the start would cost a place in the runtime and two changes of task for nothing.
pub(super) struct Detached<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    work: Option<Pin<Box<F>>>,
    /// Where it was begun; what gives it up may be elsewhere.
    runtime: Option<Handle>,
}

/// The work panicked; what it held is dropped.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Panicked;

impl<F> Detached<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    pub(super) fn new(work: F) -> Self {
        Self { work: Some(Box::pin(work)), runtime: Handle::try_current().ok() }
    }
}

impl<F> Future for Detached<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    type Output = Result<F::Output, Panicked>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(work) = &mut self.work else { return Poll::Pending };
        // What a panic leaves behind is dropped and not looked at.
        let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(cx)));
        if let Ok(Poll::Pending) = polled {
            return Poll::Pending;
        }
        let work = self.work.take();
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(work)));
        match (polled, dropped) {
            (Ok(Poll::Ready(output)), Ok(())) => Poll::Ready(Ok(output)),
            _ => Poll::Ready(Err(Panicked)),
        }
    }
}

impl<F> Drop for Detached<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn drop(&mut self) {
        if let (Some(work), Some(runtime)) = (self.work.take(), &self.runtime) {
            runtime.spawn(work);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tokio::sync::{Notify, oneshot};

    use super::*;

    #[tokio::test]
    async fn what_is_awaited_is_done_there() {
        let here = tokio::spawn(async {
            let before = tokio::task::id();
            (before, Detached::new(async { tokio::task::id() }).await)
        });
        let (outside, inside) = here.await.unwrap();
        assert_eq!(Ok(outside), inside);
    }

    #[tokio::test]
    async fn what_is_given_up_goes_on_also_from_a_thread_without_a_runtime() {
        let (go_on, (done, is_done)) = (Arc::new(Notify::new()), oneshot::channel());
        let waits = go_on.clone();
        let mut work = Box::pin(Detached::new(async move {
            waits.notified().await;
            done.send(()).unwrap();
        }));
        assert!(futures_util::poll!(work.as_mut()).is_pending());
        std::thread::spawn(move || drop(work)).join().unwrap();
        go_on.notify_one();
        is_done.await.unwrap();
    }

    #[tokio::test]
    async fn a_panic_ends_the_work_alone_and_drops_what_it_held() {
        struct Held(Arc<Mutex<bool>>);
        impl Drop for Held {
            fn drop(&mut self) {
                *self.0.lock().unwrap() = true;
            }
        }
        let dropped = Arc::new(Mutex::new(false));
        let held = Held(dropped.clone());
        let work = Detached::new(async move {
            let _held = held;
            tokio::task::yield_now().await;
            panic!("on purpose");
        });
        assert_eq!(work.await, Err::<(), _>(Panicked));
        assert!(*dropped.lock().unwrap());
    }
}

//! Growth as a drawing: SVG, on log axes.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::series::LineSeries;

use crate::Error;
use crate::growth::{Axis, Point, Series};

const SIZE: (u32, u32) = (720, 480);

/// Time against what grows, one curve for each kernel: `None` if nothing grew along this axis.
///
/// # Errors
/// The drawing library's.
pub fn time(series: &[Series], axis: Axis) -> Result<Option<String>, Error> {
    let ms = |p: &Point| Some(p.time.median_ns / 1e6);
    draw(series, axis, "milliseconds", &ms)
}

/// Bytes against what grows: of the cache, and of all that the allocator gave out where it says.
///
/// # Errors
/// The drawing library's.
pub fn memory(series: &[Series], axis: Axis) -> Result<Option<String>, Error> {
    let megabytes = |p: &Point| Some(p.allocated_bytes.unwrap_or(p.cache_bytes) as f64 / 1e6);
    draw(series, axis, "megabytes", &megabytes)
}

fn draw(
    series: &[Series],
    axis: Axis,
    unit: &str,
    y: &dyn Fn(&Point) -> Option<f64>,
) -> Result<Option<String>, Error> {
    let curves: Vec<(&Series, Vec<(f64, f64)>)> = series
        .iter()
        .filter(|s| s.axis == axis)
        .map(|s| {
            let points = s.points.iter();
            let of = |p: &Point| y(p).filter(|y| *y > 0.0).map(|y| (f64::from(p.x), y));
            (s, points.filter_map(of).collect::<Vec<_>>())
        })
        .filter(|(_, points)| !points.is_empty())
        .collect();
    if curves.is_empty() {
        return Ok(None);
    }
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
    curves_on(&area, &curves, axis, unit).map_err(|e| Error::Drawing(e.to_string()))?;
    drop(area);
    Ok(Some(svg))
}

type Backend<'a> = SVGBackend<'a>;

fn curves_on<'a>(
    area: &DrawingArea<Backend<'a>, Shift>,
    curves: &[(&Series, Vec<(f64, f64)>)],
    axis: Axis,
    unit: &str,
) -> Result<(), DrawingAreaErrorKind<<Backend<'a> as DrawingBackend>::ErrorType>> {
    area.fill(&WHITE)?;
    let all = || curves.iter().flat_map(|(_, points)| points);
    // Half a doubling of room, so that no curve lies on the frame.
    let room = std::f64::consts::SQRT_2;
    let range = |values: &mut dyn Iterator<Item = f64>| {
        let (low, high) = values.fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), v| {
            (low.min(v), high.max(v))
        });
        low / room..high * room
    };
    let xs = range(&mut all().map(|p| p.0));
    let ys = range(&mut all().map(|p| p.1));
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{unit} by {axis}"), ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(64)
        .build_cartesian_2d(xs.log_scale().base(2.0), ys.log_scale())?;
    chart
        .configure_mesh()
        .x_desc(axis.name())
        .y_desc(unit)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| format!("{y}"))
        .draw()?;
    for (at, (series, points)) in curves.iter().enumerate() {
        let colour = Palette99::pick(at).to_rgba();
        chart
            .draw_series(LineSeries::new(
                points.iter().copied(),
                colour.stroke_width(2),
            ))?
            .label(format!("{} ({})", series.kernel.name(), series.fixed))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour));
        // Not by colour alone: each curve has a mark of its own.
        for &point in points {
            match at % 3 {
                0 => chart.draw_series([Circle::new(point, 4, colour.filled())])?,
                1 => chart.draw_series([TriangleMarker::new(point, 6, colour.filled())])?,
                _ => chart.draw_series([Cross::new(point, 4, colour)])?,
            };
        }
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    area.present()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Source;
    use crate::job::Kernel;
    use crate::stats::Summary;

    fn series(kernel: Kernel, axis: Axis) -> Series {
        let point = |x: u32| Point {
            x,
            timing: Source::HostClock,
            time: Summary::new(vec![1e6 * f64::from(x)]).expect("a time"),
            cache_bytes: 88 * u64::from(x),
            allocated_bytes: None,
        };
        Series {
            kernel,
            axis,
            fixed: "8 heads".to_owned(),
            points: [1, 2, 4, 8].map(point).to_vec(),
            bends: Vec::new(),
            ended: None,
        }
    }

    #[test]
    fn every_curve_of_an_axis_is_drawn_and_named() {
        let all = [
            series(Kernel::Encode, Axis::Rows),
            series(Kernel::Rotate, Axis::Rows),
            series(Kernel::Decode, Axis::Layers),
        ];
        for draw in [time, memory] {
            let svg = draw(&all, Axis::Rows).expect("drawn").expect("two curves");
            assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
            assert!(svg.contains("encode (8 heads)") && svg.contains("rotate (8 heads)"));
            assert!(!svg.contains("decode"));
            assert_eq!(svg.matches("<circle").count(), 4);
            assert!(draw(&all, Axis::Heads).expect("nothing to draw").is_none());
        }
    }
}
